"""Many runs of one experiment, here, as processes or as Slurm jobs, gathered into one table."""
