"""The files of a Hugging Face directory, whatever their layout.

directory.py        its JSON and the headers of its files, which must agree
header.py           the header of one file; file_digests.py: what it says of its bytes
engine_names.py     what engines call things; patterns.py: expressions from files of others
config_sections.py  where config.json says what, of models that are made of several
"""
