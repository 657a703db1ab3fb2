//! Copy rules: the cases on which a change-stream script goes wrong.
