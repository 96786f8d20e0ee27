//! Counts, in this crate's tests, the bytes and tokens that are looked at: the work must be linear in the text.

#[cfg(test)]
thread_local! {
    static DONE: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Counts bytes or tokens that were looked at.
#[cfg(test)]
pub fn add(count: usize) {
    DONE.set(DONE.get() + count as u64);
}

#[cfg(not(test))]
#[inline(always)]
pub fn add(_: usize) {}

/// What a call looked at.
#[cfg(test)]
pub fn counted(call: impl FnOnce()) -> u64 {
    let before = DONE.get();
    call();
    DONE.get() - before
}
