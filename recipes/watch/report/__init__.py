"""`memsaver report`: one HTML page about a run, read from its folder alone.

reading.py: the folder, whole or in pieces, as plain data, and what it lacks
learning.py, timing.py, memory.py: figures, drawn with matplotlib; chart.py: as SVG with tips and themed colours
tables.py: figures as rows of text
sections.py: what stands on the page, in which order; page.py and page/ make it HTML
"""
