//! What the driver says of functions' occupancy and of a context's GPU, remembered: a launch may be asked about more
//! than once, and an answer takes as long as the launch.
//!
//! An answer holds until the program sets an attribute or a configuration, unloads code or destroys a context, whatever
//! that concerns: [`forget`].

use crate::cuda::{ATTRIBUTE_SM_COUNT, Ptr, SUCCESS, driver};
use crate::host::host;
use crate::launch::KernelArguments;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, SeqCst};

/// Answers that are remembered; a later one takes the place of another. A model has some dozens of kernels and shapes.
const ANSWERS: usize = 256;
/// Bits of a key's hash that choose the place.
const PLACE_BITS: u32 = ANSWERS.trailing_zeros();

/// Of what something is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Key {
    /// The function, as launched; 0: the context's GPU.
    function: u64,
    context: u64,
    /// Threads of a block, and its dynamic shared memory in bytes.
    shape: u64,
}

impl Key {
    fn place(self) -> usize {
        const SPREADS: u64 = 0x9e37_79b9_7f4a_7c15;
        let words = [self.function, self.context, self.shape];
        let hash = words.into_iter().fold(0_u64, |hash, w| (hash ^ w).wrapping_mul(SPREADS));
        (hash >> (u64::BITS - PLACE_BITS)) as usize
    }
}

/// An answer, written by one thread at a time and read by any: a sequence lock whose reader asks anew instead of
/// trying again, so that a signal handler may be either.
struct Answer {
    /// Odd: it is being written.
    turn: AtomicU64,
    /// Of [`GENERATION`]; 0: never written.
    generation: AtomicU64,
    key: [AtomicU64; 3],
    value: AtomicU64,
}

impl Answer {
    const fn new() -> Self {
        Answer {
            turn: AtomicU64::new(0),
            generation: AtomicU64::new(0),
            key: [const { AtomicU64::new(0) }; 3],
            value: AtomicU64::new(0),
        }
    }

    fn read(&self, key: Key, generation: u64) -> Option<u64> {
        let turn = self.turn.load(SeqCst);
        let is_of = self.generation.load(SeqCst) == generation;
        let [function, context, shape] = self.key.each_ref().map(|word| word.load(SeqCst));
        let value = self.value.load(SeqCst);
        let is_whole = turn.is_multiple_of(2) && self.turn.load(SeqCst) == turn;
        (is_whole && is_of && Key { function, context, shape } == key).then_some(value)
    }

    fn write(&self, key: Key, generation: u64, value: u64) {
        let turn = self.turn.load(SeqCst);
        if !turn.is_multiple_of(2)
            || self.turn.compare_exchange(turn, turn + 1, SeqCst, SeqCst).is_err()
        {
            return;
        }
        self.generation.store(generation, SeqCst);
        let Key { function, context, shape } = key;
        let words = self.key.iter().zip([function, context, shape]);
        words.for_each(|(word, part)| word.store(part, SeqCst));
        self.value.store(value, SeqCst);
        self.turn.store(turn + 2, SeqCst);
    }
}

static KNOWN: [Answer; ANSWERS] = [const { Answer::new() }; ANSWERS];
/// Changes with each [`forget`].
static GENERATION: AtomicU64 = AtomicU64::new(1);

/// What was told before may not hold any longer. After the call that changed it, and for unloads also before.
pub fn forget() {
    GENERATION.fetch_add(1, SeqCst);
}

/// Number of calls of [`forget`] so far, and one.
pub fn generation() -> u64 {
    GENERATION.load(SeqCst)
}

fn known(key: Key, ask: impl FnOnce() -> Option<u64>) -> Option<u64> {
    let answer = &KNOWN[key.place()];
    // Before the driver is asked: what changes meanwhile is not known by this answer.
    let generation = generation();
    answer.read(key, generation).or_else(|| {
        let value = ask()?;
        answer.write(key, generation, value);
        Some(value)
    })
}

/// Blocks of a function that an SM holds at once. `None`: the driver does not tell.
pub fn resident(function: usize, block: [u32; 3], shared_bytes: u32) -> Option<u64> {
    let threads = block.iter().try_fold(1_u32, |all, n| all.checked_mul(*n))?;
    // A key without a function is of the GPU.
    if function == 0 {
        return None;
    }
    let key = Key {
        function: function as u64,
        context: driver().current_context() as u64,
        shape: u64::from(threads) << 32 | u64::from(shared_bytes),
    };
    known(key, || {
        let mut count = 0;
        // SAFETY: a function of the program's that is being launched, or one of ours; a valid out-pointer.
        let result = unsafe {
            driver().occupancy?(
                &mut count,
                function as Ptr,
                i32::try_from(threads).ok()?,
                shared_bytes as usize,
            )
        };
        (result == SUCCESS).then_some(count.max(0) as u64)
    })
}

/// Blocks of a launch that the whole GPU holds at once. `None`: the driver does not tell.
pub fn resident_on_all(launch: &KernelArguments) -> Option<u64> {
    let sms = sm_count()?;
    Some(resident(launch.function as usize, launch.block, launch.shared_bytes)? * u64::from(sms))
}

/// SMs of the GPU whose context is current. `None`: unknown, or it has not as many as the one that the core was told
/// of, which is the program's first.
pub(crate) fn sm_count() -> Option<u32> {
    let context = driver().current_context() as u64;
    let count = known(Key { function: 0, context, shape: 0 }, || {
        let d = driver();
        let (mut device, mut count) = (0, 0);
        // SAFETY: valid out-pointers.
        unsafe {
            if d.ctx_device?(&mut device) != SUCCESS
                || d.device_attribute?(&mut count, ATTRIBUTE_SM_COUNT, device) != SUCCESS
            {
                return None;
            }
        }
        Some(count.max(0) as u64)
    })?;
    let told = host().client()?.report.sm_count.load(Acquire);
    (told != 0 && u64::from(told) == count).then_some(told)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering::Relaxed;
    use std::thread;

    fn key(function: u64, shape: u64) -> Key {
        Key { function, context: 7, shape }
    }

    #[test]
    fn an_answer_is_of_one_key_and_holds_until_something_changes() {
        let never = || panic!("it is known");
        let of = |key: Key, value| known(key, || Some(value));
        let keys =
            [key(1, 2), key(2, 1), Key { context: 8, ..key(1, 2) }, key(1, 2 << 32), key(1, 3)];
        for (one, value) in keys.into_iter().zip(10..) {
            assert_eq!(of(one, value), Some(value), "not that of another key");
            assert_eq!(known(one, never), Some(value));
        }
        forget();
        assert_eq!(of(keys[0], 3), Some(3));
        assert_eq!(known(key(9, 9), || None), None);
        assert_eq!(of(key(9, 9), 4), Some(4), "what nobody told is asked again");
        // Whatever changes while the driver is asked.
        let told = known(key(5, 5), || {
            forget();
            Some(1)
        });
        assert_eq!((told, of(key(5, 5), 2)), (Some(1), Some(2)));
    }

    #[test]
    fn unloads_and_contexts_that_end_are_forgotten() {
        let ends: [fn(); 4] = [
            || assert!(!crate::close_context(0)),
            || crate::closed(0, false, false),
            || crate::prepare::forget_functions(|_| false),
            crate::prepare::functions_changed,
        ];
        for end in ends {
            let before = generation();
            end();
            assert!(generation() > before);
        }
    }

    #[test]
    fn answers_of_many_threads_are_never_mixed() {
        let answer = Answer::new();
        let mixed = AtomicU64::new(0);
        let work = |from: u64| {
            for i in 0..200_000 {
                let n = (from + i) % 5 + 1;
                answer.write(key(n, n), 1, n);
                for n in 1..=5 {
                    let is_mixed = answer.read(key(n, n), 1).is_some_and(|value| value != n);
                    mixed.fetch_add(is_mixed.into(), Relaxed);
                }
            }
        };
        thread::scope(|scope| {
            (0..3).for_each(|from| drop(scope.spawn(move || work(from))));
        });
        assert_eq!(mixed.load(Relaxed), 0);
        assert_eq!((1..=5).filter(|n| answer.read(key(*n, *n), 1) == Some(*n)).count(), 1);
    }
}
