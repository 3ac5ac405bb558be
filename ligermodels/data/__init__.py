"""From files to batches: records (lines of a file) -> documents -> tokens -> packed sequences -> batches.

Files: files (the files that a user names, and their kinds); compression, json_files, hub_dataset (their content as
lines of JSON); converted (a cache of these lines); fingerprint (digests of files).
Records: records, record_fields (a line of JSON as a text or a chat); pairs (preference data).
Corpus: corpus (positions of the records, and the validation split); streaming (files without an index); orders (of
an epoch, and mixtures by weight).
Chats: chat, rendering (templates as text); turns, leaves, frames, parts, versions (which text is the assistant's);
template_files, built_in_templates, new_tokens (templates, and special tokens that they need); ends (tokens that end
texts and turns).
Tokens: tokenizer, encoding (records as tokens with labels); workers, token_cache, source (encoded by processes, and
kept); documents, examples, prompt_batches (documents, preference data, and prompts whose completions are sampled).
Batches: rows, packing (documents packed into sequences, prefetched); batches. Counts: survey. Prompts: prompts.
"""
