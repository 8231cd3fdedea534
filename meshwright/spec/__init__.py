"""Descriptions: models, clusters, jobs, strategies and plans, as frozen validated values."""
