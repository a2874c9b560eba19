# The model of train.py's defaults: a BDLM Mamba-H on bytes, which two CPU cores train in minutes.
tokenizer = "bytes"             # 256 bytes, end-of-text and the mask
seq_len = 256
block_len = 16
attn_every = 2                  # attention at layers 0 and 2; Mamba-2 at layer 1
n_layer = 3
n_head = 4
d_model = 64
d_state = 32
mamba_head_dim = 64
init_std = 0.1                  # a narrow model learns faster from larger weights; the wide ones take 0.02
embed_std = 1.0
