"""Recipes as data: what they may say (`models`), how a file becomes one (`load`)."""
