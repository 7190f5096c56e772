"""The paper's tables and figures: which runs each needs, what is measured on them, and how it is shown.

items.py      the list of them
wanted.py     the runs each of them needs, as cells
make.py       runs what is missing, measures, renders
measured.py   what is measured on a run beyond its own stages
shown.py      tables, figures and captions as files
"""
