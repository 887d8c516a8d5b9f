"""The command `report`: one page about one checkpoint, measured one tensor at a time.

command.py     arguments, help, run
records.py     what is known about each tensor and about the checkpoint, plain data
tiles.py       a tensor as pieces of bounded size, with the parts they were decoded from
elements.py    elements at the end of their format's range, codes that are no number
scales.py      histograms of scales
channels.py    rows and columns that stand out
measure.py     the shell: reads, measures, forgets
layers.py      a name as a kind and the number of a layer; kinds by layers as a grid
notes.py       what is said of all tensors together
drawing.py     small pictures as coordinates
page.py        what is shown, in which order; templates/: where and how
"""
