"""From files to batches: records (lines of a file) -> documents -> tokens -> packed sequences -> batches.

files: the files of data that a user names, and their kinds. compression, json_files, tables, hub_dataset: their
content as lines of JSON. converted: a cache of these lines. records: a line of JSON as a text or a chat.
record_fields: fields of the formats. corpus: positions of the records in the files, and the validation split.
streaming: files without an index. orders: the order of an epoch. mixture: weights of several sources. tokenizer, chat:
texts and chats as tokens, and a mask of the assistant's tokens. built_in_templates: chat templates by name.
template_tokens, new_tokens: special tokens that they add. survey: which tokens are trained on, and counts. ends: tokens
that end texts and turns. encoding: records as tokens with labels. documents: the documents of a corpus. pairs,
examples: preference data. prompt_batches: prompts, whose completions are sampled. source: documents encoded by workers
(processes), and kept in token_cache (files). notes: counts of documents that are not used in full. rows, packing:
documents packed into sequences, as prefetched batches. batches: a batch, its number of targets, its copy to the device.
prompts: beginnings of documents, for generation. fingerprint: digests of files.
"""
