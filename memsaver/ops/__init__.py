"""Bulk copies and digests of strided elements, in one pass over memory."""
