"""One fragment's arrays: the merge of updates, the outer step, and the arrays that both change."""
