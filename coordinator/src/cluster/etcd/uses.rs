//! What tenants use, carried between coordinators: each writes two keys of its own and watches those of the others.
//! Invariants: both keys are written together, the first under the lease, so that whoever has lost its lease writes neither;
//! what was spent of budgets stays when its coordinator ends, and is taken over, once, by the coordinator that leads; one
//! that was given up and is there after all notices it before it says anything.
//! Not here: what it means for a limit ([`crate::tenants`]).

use lockstep_etcd::{
    Connection, EtcdError, Lease,
    etcd_client::{Compare, CompareOp, Event, EventType, KeyValue, PutOptions, Txn, TxnOp},
    keys::Keys,
};
use lockstep_proto::{Message, v1};

use crate::tenants::{Tenants, elsewhere::Others};

/// One coordinator's side of it.
pub struct Uses {
    tenants: Tenants,
    /// Names the keys. Of the process: what an earlier one of the same name has spent is another's.
    session: u64,
    others: Others,
    /// What the keys hold, as far as it is known here; `None` if they are not there.
    said: Option<Said>,
    /// The last word was refused, which was logged.
    is_refused: bool,
}

/// What this coordinator has told the others.
struct Said {
    /// `None` if the lease that it was under has ended.
    held: Option<v1::LimitUse>,
    /// What was spent through this coordinator.
    own: v1::BudgetUse,
    /// That, and what it took over from others.
    spent: v1::BudgetUse,
}

impl Uses {
    /// Nothing said or heard yet.
    pub fn new(tenants: Tenants) -> Self {
        Self { tenants, session: rand::random(), others: Others::default(), said: None, is_refused: false }
    }

    /// Takes in all that is there; what had been heard before may be out of date.
    pub fn list(&mut self, keys: &Keys, found: &[KeyValue]) {
        self.others.forget_all();
        found.iter().for_each(|kv| self.put(keys, kv, true));
        let value_of = |key: String| found.iter().find(|kv| kv.key() == key.as_bytes()).map(KeyValue::value);
        let is_held = value_of(keys.limit_use(self.session)).is_some();
        let spent = value_of(keys.budget_use(self.session)).and_then(|value| v1::BudgetUse::decode(value).ok());
        match (spent, &mut self.said) {
            (None, Some(_)) => self.begin_again(),
            // No answer came to the first word.
            (Some(spent), None) => self.said = Some(Said { held: None, own: spent.clone(), spent }),
            (Some(_), Some(said)) if !is_held => said.held = None,
            (None, None) | (Some(_), Some(_)) => {}
        }
        self.others.tell(&self.tenants);
    }

    /// This coordinator was given up for lost: what it had said it has spent is counted by another one.
    fn begin_again(&mut self) {
        if let Some(said) = self.said.take() {
            self.tenants.hand_over(&said.own);
            self.others.forget_adopted();
        }
    }

    /// Follows changes.
    pub fn follow(&mut self, keys: &Keys, events: &[Event]) {
        for event in events {
            let Some((kv, key)) = event.kv().and_then(|kv| Some((kv, kv.key_str().ok()?))) else { continue };
            match event.event_type() {
                EventType::Put => self.put(keys, kv, false),
                EventType::Delete => {
                    keys.limit_use_of(key).into_iter().for_each(|session| self.others.forget_use(session));
                    keys.budget_use_of(key).into_iter().for_each(|session| self.others.forget_spent(session));
                }
            }
        }
        self.others.tell(&self.tenants);
    }

    /// While etcd is away each coordinator counts for itself, but for what was spent before.
    pub fn lose(&mut self) {
        self.others.forget_uses();
        self.others.tell(&self.tenants);
    }

    /// Tells the others what is new here.
    ///
    /// # Errors
    /// [`EtcdError`] if etcd does not answer or the lease has ended.
    pub async fn say(&mut self, keys: &Keys, connection: &Connection, lease: &Lease) -> Result<(), EtcdError> {
        let (held, own) = self.others.report(&self.tenants);
        let spent = self.others.with_adopted(&own);
        let is_known = match &self.said {
            Some(said) => said.held.as_ref() == Some(&held) && said.spent == spent,
            None => held == v1::LimitUse::default() && spent == v1::BudgetUse::default(),
        };
        if is_known {
            return Ok(());
        }
        let txn = Txn::new().when([self.is_as_known(keys)]).and_then(self.puts(keys, lease, &held, &spent));
        match self.carry_out(connection, txn).await? {
            Some(true) => self.said = Some(Said { held: Some(held), own, spent }),
            Some(false) => self.begin_again(),
            None => {}
        }
        Ok(())
    }

    /// Takes over what coordinators have spent that are gone. For the one that leads.
    ///
    /// # Errors
    /// As [`say`](Self::say).
    pub async fn adopt(&mut self, keys: &Keys, connection: &Connection, lease: &Lease) -> Result<(), EtcdError> {
        for session in self.others.gone() {
            let said = self.said.as_ref();
            let (held, own) = said.map(|said| (said.held.clone(), said.own.clone())).unwrap_or_default();
            let held = held.unwrap_or_default();
            let spent = self.others.with(&said.map(|said| said.spent.clone()).unwrap_or_default(), session);
            let (gone, left) = (keys.limit_use(session), keys.budget_use(session));
            let is_gone = Compare::create_revision(gone, CompareOp::Equal, 0);
            let is_left = Compare::create_revision(left.as_str(), CompareOp::NotEqual, 0);
            let mut steps = self.puts(keys, lease, &held, &spent);
            steps.push(TxnOp::delete(left, None));
            let txn = Txn::new().when([self.is_as_known(keys), is_gone, is_left]).and_then(steps);
            if self.carry_out(connection, txn).await? == Some(true) {
                self.others.adopt(session);
                self.said = Some(Said { held: Some(held), own, spent });
            }
        }
        Ok(())
    }

    /// Nobody has taken over what this coordinator has said, and if it has said nothing there is nothing.
    fn is_as_known(&self, keys: &Keys) -> Compare {
        let expected = if self.said.is_some() { CompareOp::NotEqual } else { CompareOp::Equal };
        Compare::create_revision(keys.budget_use(self.session), expected, 0)
    }

    fn puts(&self, keys: &Keys, lease: &Lease, held: &v1::LimitUse, spent: &v1::BudgetUse) -> Vec<TxnOp> {
        let leased = Some(PutOptions::new().with_lease(lease.id()));
        vec![
            TxnOp::put(keys.limit_use(self.session), held.encode_to_vec(), leased),
            TxnOp::put(keys.budget_use(self.session), spent.encode_to_vec(), None),
        ]
    }

    fn put(&mut self, keys: &Keys, kv: &KeyValue, is_known: bool) {
        let Ok(key) = kv.key_str() else { return };
        let refuse = |error: &dyn std::fmt::Display| tracing::error!(key, %error, "a value in etcd cannot be read");
        let is_other = |session: &u64| *session != self.session;
        if let Some(session) = keys.limit_use_of(key).filter(is_other) {
            match v1::LimitUse::decode(kv.value()) {
                Ok(held) => self.others.note_use(session, held, is_known),
                Err(error) => refuse(&error),
            }
        } else if let Some(session) = keys.budget_use_of(key).filter(is_other) {
            match v1::BudgetUse::decode(kv.value()) {
                Ok(spent) => self.others.note_spent(session, spent),
                Err(error) => refuse(&error),
            }
        }
    }

    /// Whether the conditions held. `None` where etcd is full or forbids it: each coordinator then counts for itself.
    async fn carry_out(&mut self, connection: &Connection, txn: Txn) -> Result<Option<bool>, EtcdError> {
        match connection.within(connection.client.kv_client().txn(txn)).await {
            Ok(done) => {
                self.is_refused = false;
                Ok(Some(done.succeeded()))
            }
            Err(error) if error.is_refusal() => {
                if !std::mem::replace(&mut self.is_refused, true) {
                    tracing::warn!(%error, "other coordinators cannot be told what tenants use");
                }
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}
