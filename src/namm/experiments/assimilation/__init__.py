"""Data assimilation with the models of a run (paper Sec. 4.2, App. D.3)."""
