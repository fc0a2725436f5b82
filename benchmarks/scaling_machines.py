"""What the cost model takes for granted of machines that are not here. Nothing in this file was measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerators:
    """Hosts with accelerators.

    Attributes:
        hosts: That learn together.
        cores: Of a host, hardware threads counted as half a core each.
        chips: Of a host.
        peak_flops: Of a chip, FLOP/s in bfloat16, which default precision uses (TF32 on a GPU: half of that).
        memory_bytes_s: Bandwidth of a chip's memory.
        link_bytes_s: What a chip sends to others in one direction, bytes/s.
        host_bytes_s: From a host's memory to its chips, all together, bytes/s.
        of_flops: Share of the peak that convolutions of 16 and 32 channels reach.
        of_memory: Share of the memory's bandwidth.
        of_links: Share of the links' bandwidth.
    """

    hosts: int
    cores: float
    chips: int
    peak_flops: float
    memory_bytes_s: float
    link_bytes_s: float
    host_bytes_s: float
    of_flops: float = 0.1
    of_memory: float = 0.5
    of_links: float = 0.5

    def seconds(self, flops: float, num_bytes: float) -> float:
        """One chip's, for a program: what takes longer of computing and moving."""
        return max(flops / (self.peak_flops * self.of_flops), num_bytes / (self.memory_bytes_s * self.of_memory))

    def all_reduce_s(self, num_bytes: float) -> float:
        """Of a ring over all chips."""
        count = self.hosts * self.chips
        return 2 * (count - 1) / count * num_bytes / (self.link_bytes_s * self.of_links)


MACHINES = {
    # https://docs.cloud.google.com/tpu/docs/v5e: 112 vCPUs for each 4-chip VM (ct5lp-hightpu-4t), 197 TFLOP/s,
    # 819 GB/s, 400 GB/s of links in both directions together. Its PCIe is not documented: a Gen3 x16 a chip is assumed.
    "v5e-256": Accelerators(64, 56, 4, 197e12, 819e9, 200e9, 4 * 16e9),
    # NVIDIA's H200 SXM: 989 TFLOP/s in bfloat16 without sparsity, so 495 in TF32; 4.8 TB/s; NVLink 900 GB/s in both
    # directions together. DGX H200: two Xeon 8480C of 56 cores each, PCIe Gen5 x16 (64 GB/s) for each GPU.
    "8x H200": Accelerators(1, 112, 8, 495e12, 4.8e12, 450e9, 8 * 64e9),
}
