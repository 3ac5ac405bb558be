"""From files to batches: records (lines of a file) -> documents -> tokens -> packed sequences -> batches.

records: a line of JSON as a text or a chat. corpus: positions of the records in the files, and the validation split.
tokenizer, chat: texts and chats as tokens, and a mask of the assistant's tokens. documents: the documents of a corpus
as tokens with labels. packing: documents packed into sequences, as prefetched batches. batches: a batch, its number of
targets, its copy to the device. prompts: beginnings of documents, for generation. fingerprint: digests of files.
"""
