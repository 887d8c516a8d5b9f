"""`report`: one page about one checkpoint, from records that are measured a tensor at a time.

records.py     what is known about a tensor and about all of them, plain data
tiles.py       a tensor as pieces of bounded size, beside the parts they were decoded from
elements.py    elements at the end of their format's range, codes that are no number
scales.py      histograms of scales
channels.py    rows and columns that stand out
measure.py     the shell: reads, measures, forgets
layers.py      names as a kind and the number of a layer
findings.py    what is said of all tensors together
drawing.py     small pictures as coordinates
page.py        what is shown, in which order; templates/: where and how
"""
