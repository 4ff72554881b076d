"""Gumbel noise out of the words of `ridgeline.core.philox`."""

import numpy as np
import numpy.typing as npt


def uniform(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
    """Words to numbers in (0, 1), in float64; those of `core.philox.to_uniform`."""
    return ((words >> np.uint32(9)).astype(np.float64) + 0.5) * 2.0**-23


def gumbel(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise −log(−log u) in float64."""
    noise: npt.NDArray[np.float64] = -np.log(-np.log(uniform(words)))
    return noise
