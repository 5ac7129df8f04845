"""Brings bytes to pages that a rank may not map: by pages, by another rank, by a handle."""
