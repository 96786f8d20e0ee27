//! What random PTX needs besides words: for these tests and for those of the rewriter.

/// Punctuation, and tokens that end in odd places.
pub const MARKS: [&str; 15] = [
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    ";",
    ",",
    "\"",
    "//",
    "/*",
    "*/",
    "\n",
    "é",
    "0x7fffffffffffffff",
];
