"""Models with draft heads: Medusa, MTP, EAGLE-3, DFlash and DSpark.

multi_head: the base class of these models, their loss and `generate`. output: their output.
Medusa: medusa, joint (trained together with the model); profiles and medusa_files (file formats).
MTP: mtp, mtp_head, mtp_files.
EAGLE-3, DFlash and DSpark: draft_head (their base class), draft_files, draft_vocabulary, draft_projection, draft_layer.
EAGLE-3: eagle3, eagle3_head, eagle3_formats.
DFlash and DSpark: block_draft (the model), dspark (the two kinds), block_head, markov_head, block_training, block_loss,
block_formats.
Decoding: decoding (a step, and the loop), tree and layout (candidates); rules, acceptance and sampling (which tokens
are accepted); drafting (drafters, and Medusa's), step_drafter (MTP, EAGLE-3), block_drafter (DFlash, DSpark).
Files: load (heads of any kind), hub, head_files. Checks of files: verify, verify_eagle3, verify_blocks, checks,
draft_checks.
Scores: evaluation, benchmark.
"""
