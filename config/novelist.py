# BDLM Mamba-H on bytes, trained on novels: the model of assets/novelist, whose card names the text.
# Text of your own: python data.py text PATH... --val PATH... --tokenizer bytes --out data/novels

out_dir = "out/novelist"
data = "data/novels"
tokenizer = "bytes"             # 256 bytes, end-of-text and the mask

attn_every = 2                  # attention at layers 0, 2, 4 and 6, Mamba-2 at all others
seq_len = 1024
block_len = 16
n_layer = 8
n_head = 3                      # head dimension 64
d_model = 192
d_state = 32                    # 6 Mamba-2 heads of 64

batch_size = 384                # 4 GPUs x 96 sequences
max_iters = 6900                # 384 x 1024 x 6900 = 2.7B bytes, 23 passes over the text
warmup_iters = 500
learning_rate = 4e-3
init_std = 0.05
t_min, t_max = 0.3, 0.7         # noise of the middle: docs/results.md
stratified = True
embed_std = 1.0
eval_interval = 1000
eval_sequences = 512
eval_samples = 1
log_interval = 50

# The model that ships went on from this in longer sequences, first on one GPU, then on two (its card says how):
# python train.py config/novelist.py --init_from=out/novelist --out_dir=out/novelist2 --seq_len=2048 --batch_size=48
#     --learning_rate=8e-4 --warmup_iters=200 --max_iters=10112
# torchrun --nproc_per_node=2 train.py config/novelist.py --init_from=out/novelist2 --out_dir=out/novelist3
#     --seq_len=2048 --batch_size=192 --learning_rate=2e-3 --warmup_iters=200 --max_iters=3500
