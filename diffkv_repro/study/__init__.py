"""Claims, measurements, figures, and the run that makes them."""

from diffkv_repro.study.records import Measurement, measurements
from diffkv_repro.study.session import ClaimFailed, Study

__all__ = ["ClaimFailed", "Measurement", "Study", "measurements"]
