"""Reports as one HTML file each: pages and charts, of plain values."""

from ridgeline.report.charts import Axes, Bar, Line, Mark, cdf, plot, waterfall
from ridgeline.report.page import Page, Tile
from ridgeline.report.scales import short

__all__ = ["Axes", "Bar", "Line", "Mark", "Page", "Tile", "cdf", "plot", "short", "waterfall"]
