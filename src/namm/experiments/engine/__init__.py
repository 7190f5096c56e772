"""What runs any experiment: settings, run folders, stages. No experiment is named here."""
