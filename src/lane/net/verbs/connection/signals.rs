//! Signals of a connection: writes, additions, or immediates and records with their credit; and the
//! ticks of one of several queue pairs.

use super::{Connection, Halt, State, fill};
use crate::lane::FlagLine;
use crate::lane::flag::WaitLimits;
use crate::lane::net::regions::Record;
use crate::lane::net::verbs::receiver::{STRIPED, STRIPED_RECORD};
use crate::lane::net::verbs::sender::Kind;
use crate::lane::net::verbs::{Remote, SignalMode};
use crate::lane::net::{RemoteAddress, SendBlocked};
use crate::schedule::Tag;

impl Connection {
    /// A signal, which waits at the peer for a tick of each other queue pair if it is striped. Then
    /// signals are immediates.
    ///
    /// # Errors
    /// As [`NetConnection::signal`].
    pub fn lead_signal(
        &self,
        to: RemoteAddress,
        (value, tag): (u64, Option<Tag>),
        striped: bool,
        limits: WaitLimits<'_>,
    ) -> Result<(), SendBlocked> {
        self.with(limits, |state| {
            let named = match self.signal {
                SignalMode::Immediate => self.number(state, to, (value, tag), striped, limits)?,
                SignalMode::Write | SignalMode::FetchAdd => {
                    self.raise(state, to, value, tag, limits)?;
                    false
                }
            };
            if let Some(forecast) = &mut state.forecast {
                forecast.signal(tag.is_some(), named);
            }
            state.sender.hurry();
            state.sender.post()?;
            Ok(())
        })
    }

    /// Says that all bytes of this queue pair so far have landed.
    ///
    /// # Errors
    /// As [`NetConnection::signal`].
    pub fn tick(&self, limits: WaitLimits<'_>) -> Result<(), SendBlocked> {
        self.with(limits, |state| {
            self.credit(state, limits)?;
            state.receiver.signals();
            if !state.sender.take_along(0) {
                state.sender.ask(Kind::Immediate(0), state.receiver.grant_to());
            }
            if let Some(forecast) = &mut state.forecast {
                forecast.signal(false, true);
            }
            state.sender.hurry();
            state.sender.post()?;
            Ok(())
        })
    }

    /// Raises a word by writes, or by an addition.
    fn raise(
        &self,
        state: &mut State,
        to: RemoteAddress,
        value: u64,
        tag: Option<Tag>,
        limits: WaitLimits<'_>,
    ) -> Result<(), Halt> {
        let (remote, _) = self.remote(&state.theirs, to)?;
        state.sender.close();
        if let Some(tag) = tag {
            let at = Remote { addr: remote.addr + FlagLine::tag_offset(value), rkey: remote.rkey };
            self.write_words(state, at, &tag.to_words(), limits)?;
        }
        if self.signal == SignalMode::FetchAdd {
            let growth = state.sent.growth(to, value);
            state.sender.ask(Kind::Add(growth), remote);
            return Ok(());
        }
        self.write_words(state, remote, &[value], limits)
    }

    /// Words of a flag's line: inside the request if the NIC takes them there, else in a line of
    /// the block.
    pub(super) fn write_words(
        &self,
        state: &mut State,
        to: Remote,
        words: &[u64],
        limits: WaitLimits<'_>,
    ) -> Result<(), Halt> {
        if !state.sender.ask_inside(to, words) {
            let line = self.line(state, size_of_val(words), limits)?;
            fill(&line, bytemuck::cast_slice(words));
            state.sender.ask_line(Kind::Write, to, &line);
        }
        Ok(())
    }

    /// Waits until the peer has a receive for one more signal.
    fn credit(&self, state: &mut State, limits: WaitLimits<'_>) -> Result<(), Halt> {
        if state.receiver.may_signal(state.sender.block.granted()) {
            return Ok(());
        }
        state.sender.post_soon();
        self.until(state, limits, |state| {
            // Others wait for staging that the open write holds, and no visit comes meanwhile.
            if state.sender.is_wanted() {
                state.hurry();
            }
            Ok(state.receiver.may_signal(state.sender.block.granted()).then_some(()))
        })
    }

    /// Signals by a number, which the peer's receive reports. Returns whether the number was
    /// enough.
    fn number(
        &self,
        state: &mut State,
        to: RemoteAddress,
        (value, tag): (u64, Option<Tag>),
        striped: bool,
        limits: WaitLimits<'_>,
    ) -> Result<bool, Halt> {
        let (remote, _) = self.remote(&state.theirs, to)?;
        self.credit(state, limits)?;
        if tag.is_none()
            && state.sent.fits(to, value)
            && let Ok(immediate) = state.sent.immediate(to, value)
        {
            state.receiver.signals();
            let immediate = if striped { immediate | STRIPED } else { immediate };
            if !state.sender.take_along(immediate) {
                state.sender.ask(Kind::Immediate(immediate), remote);
            }
            return Ok(true);
        }
        state.sender.close();
        // Counted only once there is room for it: a sender whose wait failed may signal again.
        let line = self.line(state, 64, limits)?;
        state.receiver.signals();
        let record = Record::Signal { region: to.region, offset: to.offset, value, tag };
        let mut words = record.to_words();
        words[7] = state.sent.record(to, value).into();
        words[7] |= if striped { STRIPED_RECORD } else { 0 };
        fill(&line, bytemuck::cast_slice(&words));
        state.sender.ask_line(Kind::Send, Remote { addr: 0, rkey: 0 }, &line);
        Ok(false)
    }
}
