"""Text to rows of tokens: where they come from, how they are packed, and which rows a step sees.

In the order in which text goes through: `config` says what text; `records` reads files, one document at a time; `scan`
reads them all through once, hashes the documents and tells what is wrong; `corpus` puts the files of all sources in an
order and draws the border between training and validation; `tokenizer` (with `tokenizer_files`) turns text into
tokens; `shards` writes them (with `token_files`, and on all cores by `parallel`); `rows` cuts rows from them; `mixture`
(with `order`) says which row a sample is; `loader` brings the rows of a step onto the devices. `prepare` does all of it
up to the rows; `statistics` and `baselines` say what text it is. `cache` keeps files that can be built again.
"""
