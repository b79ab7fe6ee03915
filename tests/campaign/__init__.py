"""Campaigns: many lives of one training run, compared with a run that nothing happened to."""
