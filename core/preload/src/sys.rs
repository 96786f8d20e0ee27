//! System calls, the environment and bytes, without the C library.
//!
//! Bytes are read and written as volatile: the compiler would make calls of `strlen` and `memcpy` of
//! these loops.

use core::ffi::{CStr, c_char};
use core::mem::MaybeUninit;
use core::ptr::null;

pub const GETPID: usize = 39;
pub const GETTID: usize = 186;
pub const GETUID: usize = 102;
pub const WRITE: usize = 1;
pub const OPEN: usize = 2;
pub const CLOSE: usize = 3;
pub const SOCKET: usize = 41;
pub const CONNECT: usize = 42;
pub const SENDTO: usize = 44;
pub const READLINK: usize = 89;

/// A system call; what it returns, errors below 0.
///
/// # Safety
/// As the call.
pub unsafe fn call(number: usize, arguments: [usize; 6]) -> isize {
    let [a, b, c, d, e, f] = arguments;
    let result;
    // SAFETY: by the caller; the kernel changes `rcx` and `r11` only.
    unsafe {
        core::arch::asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") a,
            in("rsi") b,
            in("rdx") c,
            in("r10") d,
            in("r8") e,
            in("r9") f,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result
}

/// `ioctl` where there is no C library to ask: without `errno`, which there is none of either.
#[unsafe(naked)]
pub unsafe extern "C" fn raw_ioctl() {
    core::arch::naked_asm!(
        "endbr64",
        "mov eax, 16",
        "syscall",
        "cmp rax, -4095",
        "jb 2f",
        "mov eax, -1",
        "2:",
        "ret",
    )
}

/// Bytes before the NUL.
///
/// # Safety
/// `text` is NUL-terminated.
pub unsafe fn length(text: *const u8) -> usize {
    let mut n = 0;
    // SAFETY: by the caller.
    while unsafe { text.add(n).read_volatile() } != 0 {
        n += 1;
    }
    n
}

/// Whether two texts are the same.
///
/// # Safety
/// Both are NUL-terminated.
pub unsafe fn equal(a: *const u8, b: *const u8) -> bool {
    let mut i = 0;
    loop {
        // SAFETY: by the caller; neither is read beyond its NUL.
        let (x, y) = unsafe { (a.add(i).read_volatile(), b.add(i).read_volatile()) };
        if x != y || x == 0 {
            return x == y;
        }
        i += 1;
    }
}

/// The value of an environment variable, unless it is empty or missing.
pub fn variable(name: &CStr) -> Option<*const u8> {
    let at: *const *const *const u8;
    // SAFETY: reads this library's own table, where the loader put the address or 0.
    unsafe {
        core::arch::asm!(
            ".weak environ",
            "mov {at}, qword ptr [rip + environ@GOTPCREL]",
            at = out(reg) at,
            options(nostack, pure, readonly, preserves_flags),
        );
    }
    let name: *const u8 = name.as_ptr().cast();
    // SAFETY: the environment is a list of NUL-terminated texts that ends with a null pointer. Another
    // thread that changes it meanwhile is the program's mistake, as with `getenv`.
    unsafe {
        let bytes = length(name);
        let mut entry = at.as_ref().copied().unwrap_or(null());
        while let Some(text) = entry.as_ref().copied().filter(|text| !text.is_null()) {
            let mut i = 0;
            while i < bytes && text.add(i).read_volatile() == name.add(i).read_volatile() {
                i += 1;
            }
            if i == bytes && text.add(i).read_volatile() == b'=' {
                let value = text.add(bytes + 1);
                return (value.read_volatile() != 0).then_some(value);
            }
            entry = entry.add(1);
        }
    }
    None
}

/// A text of at most `N` bytes; what goes beyond is left out.
pub struct Text<const N: usize> {
    bytes: [MaybeUninit<u8>; N],
    len: usize,
    cut: bool,
}

impl<const N: usize> Text<N> {
    pub const fn new() -> Self {
        Text { bytes: [MaybeUninit::uninit(); N], len: 0, cut: false }
    }

    /// Appends a byte; one that finds no room is dropped and noted in `cut`.
    pub fn byte(&mut self, byte: u8) {
        match self.bytes.get_mut(self.len) {
            Some(place) => {
                // SAFETY: a place of our own.
                unsafe { place.as_mut_ptr().write_volatile(byte) };
                self.len += 1;
            }
            None => self.cut = true,
        }
    }

    /// So many bytes more.
    ///
    /// # Safety
    /// They are readable.
    pub unsafe fn bytes(&mut self, bytes: *const u8, count: usize) -> &mut Self {
        for i in 0..count {
            // SAFETY: by the caller.
            self.byte(unsafe { bytes.add(i).read_volatile() });
        }
        self
    }

    /// Appends a text, as far as there is room.
    pub fn str(&mut self, text: &str) -> &mut Self {
        // SAFETY: a `str`'s bytes.
        unsafe { self.bytes(text.as_ptr(), text.len()) }
    }

    /// A text more.
    ///
    /// # Safety
    /// It is NUL-terminated.
    pub unsafe fn c_str(&mut self, text: *const u8) -> &mut Self {
        // SAFETY: by the caller.
        unsafe { self.bytes(text, length(text)) }
    }

    /// A number more, in decimal.
    pub fn number(&mut self, number: usize) -> &mut Self {
        if number >= 10 {
            self.number(number / 10);
        }
        self.byte(b'0' + (number % 10) as u8);
        self
    }

    /// A number more, as a frame has it.
    pub fn word(&mut self, word: u32) -> &mut Self {
        for i in 0..4 {
            self.byte((word >> (8 * i)) as u8);
        }
        self
    }

    /// Start of the bytes, which end in a NUL only if one was appended.
    pub fn at(&self) -> *const u8 {
        self.bytes.as_ptr().cast()
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// NUL-terminated; `None` if something was left out.
    pub fn terminated(&mut self) -> Option<*const c_char> {
        self.byte(0);
        (!self.cut).then_some(self.bytes.as_ptr().cast())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown<const N: usize>(text: &Text<N>) -> &[u8] {
        // SAFETY: its own bytes.
        unsafe { std::slice::from_raw_parts(text.at(), text.len()) }
    }

    #[test]
    fn texts_are_put_together_and_end_where_there_is_no_room() {
        let mut text = Text::<12>::new();
        text.str("ab").number(1204).word(0x0201);
        assert_eq!(shown(&text), b"ab1204\x01\x02\0\0");
        assert!(text.terminated().is_some());
        text.str("more");
        assert_eq!(text.len(), 12);
        assert!(text.terminated().is_none());
    }

    #[test]
    fn variables_are_found_by_their_whole_names() {
        let path = variable(c"PATH").unwrap();
        // SAFETY: NUL-terminated.
        let path = unsafe { CStr::from_ptr(path.cast()) }.to_str().unwrap();
        assert_eq!(path, std::env::var("PATH").unwrap());
        assert!(variable(c"PAT").is_none() && variable(c"TALLY_NO_SUCH_VARIABLE").is_none());
    }

    #[test]
    fn texts_are_compared_as_a_whole() {
        // SAFETY: NUL-terminated.
        let same = |a: &CStr, b: &CStr| unsafe { equal(a.as_ptr().cast(), b.as_ptr().cast()) };
        assert!(same(c"cuInit", c"cuInit") && same(c"", c""));
        assert!(!same(c"cuInit", c"cuIni") && !same(c"cuIni", c"cuInit") && !same(c"", c"a"));
    }
}
