"""Flags with which XLA's CPU backend compiles quickly: tests compile much and run little."""

from importlib.metadata import version

_FLAGS = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
if version("jaxlib").startswith("0.10."):  # later ones do not know it, and end the process
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")  # MLIR's take three times as long to compile
QUICK_XLA = " ".join(_FLAGS)
