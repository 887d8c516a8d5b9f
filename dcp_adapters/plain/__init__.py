"""What knows nothing of quantized tensors.

words.py tables.py progress_bar.py  values in few words, tables for people, a bar for long work
logged_work.py                      log lines around long work
placed_shard.py described.py        shards that say themselves where they lie: PlacedShard, and those of others
tiling.py                           do boxes cover a tensor exactly?
plain_memory.py                     the bytes of a tensor, where it has some
durable.py                          files that survive a crash
"""
