"""What engines make of a directory, where that is not what its tensors say: the command `check`.

misread.py    names, schemes and scales that engines take for something else
"""
