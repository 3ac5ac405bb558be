"""Speeds of GPUs and their links, for estimates of training steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """Speed of a GPU and its links that training steps reach; data sheets have higher numbers.

    The defaults are for an H200 with NVLink and one 400 Gb/s network adapter per GPU. `flops`, `memory_bandwidth`,
    `contention` and `launch_s` are fitted to recorded steps on one and two H200s (docs/planning.md).

    Args:
        flops: operations per second in bfloat16 matrix products and attention.
        memory_bandwidth: bytes per second that a GPU reads and writes in its own memory.
        host_bandwidth: bytes per second that a GPU sends within its host (NVLink).
        network_bandwidth: bytes per second that a GPU sends to other hosts.
        gpus_per_host: GPUs in a host.
        host_memory_bandwidth: bytes per second that a GPU copies to or from its host's memory (PCIe 5).
        contention: seconds that computation takes longer for each second of communication beside it.
        launch_s: seconds of the CPU to launch the kernels of a block, forward and backward; FSDP2 and a mixture take as
            long again, the exchange of its tokens between ranks twice as long.
    """

    flops: float = 620e12
    memory_bandwidth: float = 3.5e12
    host_bandwidth: float = 350e9
    network_bandwidth: float = 45e9
    gpus_per_host: int = 8
    host_memory_bandwidth: float = 50e9
    contention: float = 0.5
    launch_s: float = 2.5e-3

    def bandwidth(self, ranks: int, stride: int) -> float:
        """Bytes per second of a collective of `ranks` GPUs, with `stride` between neighbours.

        Between hosts, data crosses the network once for all members in a host, over all of their adapters.
        """
        if ranks * stride <= self.gpus_per_host:
            return self.host_bandwidth
        return min(self.host_bandwidth, self.network_bandwidth * max(1, self.gpus_per_host // stride))

    def exchange_s(self, sent: float, ranks: int, stride: int) -> float:
        """Seconds of an all-to-all. Each GPU sends data for other hosts over its own adapter.

        Args:
            sent: bytes that a GPU sends, in equal parts to all others.
            ranks: number of GPUs.
            stride: distance between neighbours.
        """
        if ranks == 1:
            return 0.0
        near = min(ranks, max(1, self.gpus_per_host // stride))
        beyond = sent * (ranks - near) / (ranks - 1)
        return max((sent - beyond) / self.host_bandwidth, beyond / self.network_bandwidth)
