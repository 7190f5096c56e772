"""The paper's tables and figures, each in a file named after it: `table1.py`, `fig4.py`, `fig5_fig11.py`, …

items.py          the list of them, and the runs that each needs
make.py           runs what is missing, measures, writes tables, figures and captions
measurements.py   a finished run, and what is measured on it beyond its own stages
output.py         what an item shows: rows of a table, figures, sentences
"""
