"""The numbers that weights are rounded to, one file for each kind of grid."""

from ridgeline.compress.grids.base import Grid, Steps
from ridgeline.compress.grids.blocks import Blocks
from ridgeline.compress.grids.factored import FactoredIntegers
from ridgeline.compress.grids.integers import Integers
from ridgeline.compress.grids.tables import Table, mxfp4

__all__ = ["Blocks", "FactoredIntegers", "Grid", "Integers", "Steps", "Table", "mxfp4"]
