"""Every long bar: measured in one go, read from the rows that it leaves, passed or missed."""
