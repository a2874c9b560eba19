# The default of train.py, spelled out: a BDLM Mamba-H on bytes that two cores train in minutes.
# 4 sequences x 256 bytes a step: on a CPU many small steps learn more than few large ones.
