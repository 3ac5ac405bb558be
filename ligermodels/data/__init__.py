"""From files to batches: records (lines of a file) -> documents -> tokens -> packed sequences -> batches.

records: a line of JSON as a text or a chat. record_fields: fields of the formats. corpus: positions of the records in
the files, and the validation split. tokenizer, chat: texts and chats as tokens, and a mask of the assistant's tokens.
ends: tokens that end texts and turns. encoding: records as tokens with labels. documents: the documents of a corpus.
source: documents encoded by workers (processes), and kept in token_cache (files). orders: the order of an epoch.
streaming: files without an index. notes: counts of documents that are not used in full. rows, packing: documents packed
into sequences, as prefetched batches. batches: a batch, its number of targets, its copy to the device. prompts:
beginnings of documents, for generation. fingerprint: digests of files.
"""
