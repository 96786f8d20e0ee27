//! Completions: what ended, what is learnt of it, and what it is charged for.

use super::{Action, Engine};
use crate::policy::{Class, ClientId, Completion, Event, Form, subscription};

impl Engine {
    /// A stream's completion word reads `word`. `observed_gap_ns` is the time
    /// since it was last looked at: how far off the measurement can be.
    pub fn progress(
        &mut self,
        now_ns: u64,
        client: ClientId,
        stream: u32,
        word: u32,
        observed_gap_ns: u64,
        out: &mut Vec<Action>,
    ) {
        let Some(c) = self.clients.get_mut(&client) else { return };
        let Some(s) = c.streams.get_mut(stream as usize) else { return };
        let done =
            s.in_flight.iter().take_while(|f| word.wrapping_sub(f.completion) as i32 >= 0).count();
        if done == 0 {
            return;
        }
        let started = s.in_flight[0].let_go_ns.max(s.last_done_ns);
        s.last_done_ns = now_ns;
        let together_ns = now_ns.saturating_sub(started);
        // Several seen done at once cannot be told apart: they share the time.
        // Learnt from is only one that is reported by itself, at once, and was
        // looked at soon enough.
        let share_ns = together_ns / done as u64;
        let learnt_ns = share_ns.saturating_sub(self.config.measuring_ns).max(share_ns / 4).max(1);
        let soon = done == 1 && observed_gap_ns <= (together_ns / 4).max(5_000);
        let mut told = Vec::new();
        for _ in 0..done {
            let Some(f) = c.streams[stream as usize].in_flight.pop_front() else { break };
            c.ended(&f);
            // A late report includes time in which it was done already.
            let charged_ns = match f.predicted_ns {
                0 => share_ns,
                // Time in which it stood aside for others is not its own.
                predicted if crate::client::gives_way(f.form) && f.disturbed => {
                    share_ns.min(predicted.saturating_mul(2))
                }
                predicted if f.exact => share_ns.min(predicted.saturating_mul(64)),
                predicted => share_ns.min(predicted),
            };
            c.stats.completed += 1;
            c.stats.gpu_ns += charged_ns;
            c.served_ns += charged_ns;
            if c.info.class == Class::BestEffort {
                let ns = if f.predicted_ns > 0 { f.predicted_ns } else { charged_ns };
                self.work_done.launches += 1;
                self.work_done.ns = self.work_done.ns.saturating_add(ns);
            }
            if let Some(kernel) = f.kernel {
                let profiles = &mut self.context.world.profiles;
                let unmeasured = f.form == Form::Whole && profiles.mean_ns(kernel) == 0;
                if f.exact && done == 1 && (unmeasured || (soon && !f.disturbed)) {
                    match f.form {
                        Form::Whole => profiles.record(kernel, learnt_ns),
                        form => profiles.record_form(kernel, form, f.argument, learnt_ns),
                    }
                }
                if self.subscribed & subscription::COMPLETIONS != 0 {
                    told.push(Event::KernelDone(Completion {
                        client,
                        kernel,
                        form: f.form,
                        argument: f.argument,
                        predicted_ns: f.predicted_ns,
                        measured_ns: charged_ns,
                    }));
                }
            }
        }
        c.window_noted = false;
        c.window_until_ns = 0;
        c.window_stalled = false;
        c.moved_ns = now_ns;
        let high = c.info.class == Class::High;
        for event in told {
            self.tell(now_ns, &event, out);
        }
        if high {
            self.note_high(now_ns, None, out);
        }
        self.settle_yield(now_ns, out);
        self.settle_one(now_ns, client, out);
    }
}
