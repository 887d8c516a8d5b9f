"""What layers are called with: recorded from the parent, replayed batch by batch.

values/     calls and the values in them: kept, taken apart, compared, put together
recording/  what each layer is called with, from a run of the parent with stand-ins in place of the layers
replaying/  a stage run on one batch after the other
"""
