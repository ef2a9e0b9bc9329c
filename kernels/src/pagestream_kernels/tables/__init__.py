"""Tile sizes of the attention kernels by chip."""

from pagestream_kernels.tables.rows import CHIPS, ChipTable, Row, RowKey, chips, load_table, table_of_name

__all__ = ["CHIPS", "ChipTable", "Row", "RowKey", "chips", "load_table", "table_of_name"]
