//! Changes at byte offsets: what the rewriter does not own, it cannot change.

/// One change of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edit {
    /// The byte of the source at which it happens.
    pub at: usize,
    /// Bytes of the source that it takes away.
    pub removed: usize,
    /// Text that it inserts there.
    pub text: String,
}

impl Edit {
    pub(super) fn insert(at: usize, text: String) -> Self {
        Edit { at, removed: 0, text }
    }

    pub(super) fn replace(range: std::ops::Range<usize>, text: String) -> Self {
        Edit { at: range.start, removed: range.len(), text }
    }
}

/// `source` with `edits`, which are in order and apart.
pub(super) fn apply(source: &str, edits: &[Edit]) -> String {
    let added: usize = edits.iter().map(|e| e.text.len()).sum();
    let mut out = String::with_capacity(source.len() + added);
    let mut done = 0;
    for edit in edits {
        out.push_str(&source[done..edit.at]);
        out.push_str(&edit.text);
        done = edit.at + edit.removed;
    }
    out.push_str(&source[done..]);
    out
}

/// The source again, from what [`apply`] made of it with `edits`, or `None` where it
/// did not make that. `source` only says what the edits took away.
pub fn undo(source: &str, edited: &str, edits: &[Edit]) -> Option<String> {
    let mut out = String::with_capacity(source.len());
    let (mut at, mut done) = (0, 0);
    for edit in edits {
        let kept = edit.at.checked_sub(done)?;
        out.push_str(edited.get(at..at + kept)?);
        at += kept;
        if !edited.get(at..)?.starts_with(&edit.text) {
            return None;
        }
        at += edit.text.len();
        done = edit.at + edit.removed;
        out.push_str(source.get(edit.at..done)?);
    }
    out.push_str(edited.get(at..)?);
    Some(out)
}
