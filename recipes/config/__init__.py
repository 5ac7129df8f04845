"""Recipes as data: their sections (`models`), the whole (`recipe`), and loading (`load`)."""
