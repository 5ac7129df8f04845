"""Brings a rank's bytes to a target whose pages it may not be able to map: by pages, by another
rank, by a handle.
"""
