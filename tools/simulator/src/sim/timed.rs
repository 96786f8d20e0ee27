//! The engine, and when it wants to be woken: most events are the GPU's alone and change nothing of that.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use tally_engine::Engine;

pub struct Timed {
    engine: Engine,
    /// `None` once the engine may have changed.
    deadline: Cell<Option<Option<u64>>>,
}

impl Timed {
    pub fn new(engine: Engine) -> Self {
        Timed { engine, deadline: Cell::new(None) }
    }

    pub fn next_deadline_ns(&self) -> Option<u64> {
        let deadline = self.deadline.get().unwrap_or_else(|| self.engine.next_deadline_ns());
        self.deadline.set(Some(deadline));
        deadline
    }
}

impl Deref for Timed {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        &self.engine
    }
}

impl DerefMut for Timed {
    fn deref_mut(&mut self) -> &mut Engine {
        self.deadline.set(None);
        &mut self.engine
    }
}
