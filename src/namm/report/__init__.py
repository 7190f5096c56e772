"""The report of a run: its `contents`, the `page` made of them, and `figures`."""
