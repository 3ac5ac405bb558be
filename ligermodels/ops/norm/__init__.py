"""RMSNorm and LayerNorm, with the residual addition that precedes them."""
