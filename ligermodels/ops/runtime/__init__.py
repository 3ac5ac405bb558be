"""What all ops share: the choice of backend, kernel launches, registration with torch, sharding rules."""
