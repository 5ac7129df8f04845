"""How a rank's bytes reach a target whose pages it may not be able to map: by pages, by another
rank, by a handle.
"""
