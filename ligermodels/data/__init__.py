"""From files to batches: records (lines of a file) -> documents -> tokens -> packed sequences -> batches.

records: a line of JSON as a text or a chat. corpus: where the records are in the files, and the validation split.
tokenizer, chat: text and chats as tokens, and which of them are trained on. documents: the documents of a corpus as
tokens. packing: documents packed into sequences, as prefetched batches. batches: a batch, its targets, its copy to the
device. prompts: beginnings of documents, to continue. fingerprint: the content of files.
"""
