//! Short names for what policies ask of a launch, of a decision and of a profile most often.

use crate::{
    Answer, Decision, Form, FormProfile, FormsOffered, KernelProfile, Launch, LaunchState,
    NO_REASON, Transformation,
};

impl Launch {
    /// Whether the launch is of a high-priority client.
    pub fn is_high(&self) -> bool {
        self.state.contains(LaunchState::HIGH_PRIORITY)
    }

    /// A high-priority client has work on this GPU now.
    pub fn high_active(&self) -> bool {
        self.state.contains(LaunchState::HIGH_ACTIVE)
    }

    /// It was held before and is offered again.
    pub fn offered_again(&self) -> bool {
        self.state.contains(LaunchState::OFFERED_AGAIN)
    }

    /// Whether the launch is of a CUDA graph.
    pub fn is_graph(&self) -> bool {
        self.state.contains(LaunchState::GRAPH)
    }

    /// Its client has a floor: [`crate::ClientState::min_share_permille`].
    pub fn has_min_share(&self) -> bool {
        self.state.contains(LaunchState::MIN_SHARE)
    }

    /// The core can run it as slices of blocks.
    pub fn can_slice(&self) -> bool {
        self.offered.contains(FormsOffered::SLICED)
    }

    /// The core can run it so that it yields at block boundaries.
    pub fn can_preempt(&self) -> bool {
        self.offered.contains(FormsOffered::PREEMPTIBLE)
    }

    /// The core can run it on some of the SMs.
    pub fn can_limit(&self) -> bool {
        self.offered.contains(FormsOffered::SM_LIMITED)
    }

    /// Its kernel could be transformed: deciding for such a form has that done.
    pub fn can_prepare(&self) -> bool {
        self.offered.contains(FormsOffered::PREPARABLE)
    }

    /// Whether the core can run it in this form.
    pub fn offers(&self, form: Form) -> bool {
        match form {
            Form::Whole => true,
            Form::Sliced => self.can_slice(),
            Form::Preemptible => self.can_preempt(),
            Form::SmLimited => self.can_limit(),
        }
    }

    /// The form that the core runs it in after this decision: whole, if the one decided for is not on offer.
    pub fn runs_as(&self, decision: Decision) -> Form {
        let (form, _) = decision.form();
        if self.offers(form) { form } else { Form::Whole }
    }
}

impl Decision {
    /// The form that it asks for, with its argument: blocks of a slice, or SMs; else 0.
    pub fn form(self) -> (Form, u32) {
        match self {
            Decision::Sliced(blocks) => (Form::Sliced, blocks),
            Decision::Preemptible => (Form::Preemptible, 0),
            Decision::SmLimited(sms) => (Form::SmLimited, sms),
            Decision::Run(_) | Decision::Hold(_) | Decision::HoldUntilCompletion(_) => {
                (Form::Whole, 0)
            }
        }
    }

    /// This decision with a reason, which [`crate::host::define_reason`] gives a text.
    pub fn because(self, reason: impl Into<u8>) -> Answer {
        Answer { decision: self, reason: reason.into() }
    }
}

/// Defines the reasons of a policy's decisions and their texts: an enum `Reason`, numbered from 1, for
/// [`Decision::because`], whose `define_all` is called in `init`.
///
/// ```
/// tally_sdk::reasons! {
///     Busy = "high-priority work is active",
///     Alone = "no high-priority client is connected",
/// }
///
/// use tally_sdk::testing::{Call, calls};
/// Reason::define_all();
/// let text = "no high-priority client is connected".into();
/// assert_eq!(calls()[1], Call::DefineReason { reason: Reason::Alone.into(), text });
/// ```
#[macro_export]
macro_rules! reasons {
    ($($name:ident = $text:literal),+ $(,)?) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        enum Reason {
            $($name,)+
        }

        impl Reason {
            fn define_all() {
                $($crate::host::define_reason(Self::$name.into(), $text);)+
            }
        }

        impl ::core::convert::From<Reason> for u8 {
            fn from(reason: Reason) -> u8 {
                reason as u8 + 1
            }
        }
    };
}

impl KernelProfile {
    /// What was measured of the form that a decision asks for; `None` of whole launches, whose figures are the
    /// kernel's own.
    pub fn of_form(&self, decision: Decision) -> Option<&FormProfile> {
        let asked = decision.form();
        self.forms.iter().find(|f| (f.form, f.argument) == asked && f.form != Form::Whole)
    }

    /// Why a launch of the kernel cannot run in parts; `None` if it can.
    pub fn why_whole(&self, launch: &Launch) -> Option<&str> {
        match &self.transformation {
            Transformation::WholeOnly(why) => Some(why),
            _ if !launch.has_boundaries() => Some("all its blocks start at once"),
            _ if launch.can_slice() || launch.can_preempt() => None,
            _ => Some("no other form is on offer"),
        }
    }
}

/// Run it whole, without a lease.
impl Default for Decision {
    fn default() -> Self {
        Decision::Run(0)
    }
}

/// No form but whole.
impl Default for FormsOffered {
    fn default() -> Self {
        FormsOffered::empty()
    }
}

impl From<Decision> for Answer {
    fn from(decision: Decision) -> Self {
        decision.because(NO_REASON)
    }
}

/// Compares the decisions; the answer's reason does not count.
impl PartialEq<Decision> for Answer {
    fn eq(&self, other: &Decision) -> bool {
        self.decision == *other
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{kernel, launch};

    #[test]
    fn a_form_that_is_not_on_offer_runs_whole() {
        for (decision, offer, form) in [
            (Decision::Sliced(3), FormsOffered::SLICED, Form::Sliced),
            (Decision::Preemptible, FormsOffered::PREEMPTIBLE, Form::Preemptible),
            (Decision::SmLimited(8), FormsOffered::SM_LIMITED, Form::SmLimited),
        ] {
            let offers = |offered| Launch { offered, ..launch() };
            assert_eq!(offers(FormsOffered::all()).runs_as(decision), form);
            assert_eq!(offers(FormsOffered::all() - offer).runs_as(decision), Form::Whole);
            assert_eq!(offers(offer).runs_as(Decision::Run(4)), Form::Whole);
        }
    }

    #[test]
    fn why_a_kernel_runs_whole_depends_on_the_launch_and_on_its_code() {
        let launch = Launch { grid_blocks: 500, sm_count: 132, ..launch() };
        let profile = kernel(500);
        let sliced = Launch { offered: FormsOffered::SLICED, ..launch };
        let limited = Launch { offered: FormsOffered::SM_LIMITED, ..launch };
        let one_wave = Launch { grid_blocks: 132, ..sliced };
        assert_eq!(profile.why_whole(&sliced), None);
        assert_eq!(profile.why_whole(&limited), Some("no other form is on offer"));
        assert_eq!(profile.why_whole(&one_wave), Some("all its blocks start at once"));
        let transformation = Transformation::WholeOnly("blocks wait".into());
        assert_eq!(
            KernelProfile { transformation, ..profile }.why_whole(&sliced),
            Some("blocks wait")
        );
    }

    #[test]
    fn an_answer_is_its_decision_whatever_the_reason() {
        assert_eq!(Decision::Hold(5).because(9_u8), Decision::Hold(5));
        assert_eq!(Answer::from(Decision::Run(0)).reason, NO_REASON);
    }
}
