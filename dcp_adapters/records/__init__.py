"""What is stored, in records that most other folders of dcp_adapters share.

entry.py                     one tensor and its parts
manifest.py                  all that a checkpoint says of its quantized tensors
source.py                    anything that has tensors: names at once, values one tensor at a time
expand.py                    quantized leaves of a state dict as their parts
part_places.py               where the parts of a shard lie; placements.py: how they are sharded
checksums.py weight_sums.py  sums of what is stored, and of weights wherever they are
soundness.py                 does a tensor mean what it should: scales, histories, masters?
masters.py                   which tensor does a master belong to?
rotations.py                 which linears take inputs that are rotated at run time
recipe_names.py              recipes and dtypes by name
"""
