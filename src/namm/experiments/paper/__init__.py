"""The paper's tables and figures, each in a file named after it: `table1.py`, `fig4.py`, `fig5_fig11.py`, …

items.py          the list of them: which runs each needs, how it is measured and shown
runs_needed.py    the runs, as cells
make.py           runs what is missing, measures, renders
measurements.py   what is measured on a run beyond its own stages
output.py         tables, figures and captions as files
"""
